"""The built-in recipes, YAML files that the command line takes by name: ``digenrl train quickstart``."""
