"""Base: records, errors, files, the command line and the configuration; standard library and PyYAML only."""
