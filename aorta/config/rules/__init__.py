"""Rules between keys, one file per group: each yields one message per broken rule. `aorta.config.resolve` gathers
them.
"""
