"""What an operator set: flags, variables and the configuration file, and how an edit arrives."""
