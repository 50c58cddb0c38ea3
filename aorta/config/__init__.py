"""What was asked: typed schema, words of the command line, rules between fields. No torch, no pandas."""
