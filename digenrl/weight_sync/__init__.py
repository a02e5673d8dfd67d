"""Buffered weight sync from one trainer to its generators: publish a version, carry its buckets, load it or nothing."""
