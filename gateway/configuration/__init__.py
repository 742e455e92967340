"""The operator's settings: flags, variables and the configuration file, with its edits."""
