"""Configuration: typed schema, command-line overrides, rules between fields. No torch, no pandas."""
