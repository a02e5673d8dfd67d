"""Files that ship with the package: the tiny shapes model and its prompts."""
