"""Settings of the built-in components, torch-free so that recipes are checked in a second."""
