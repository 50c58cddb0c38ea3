"""Rules between keys, a file a group: each yields one message per broken rule. `aorta.config.resolve` gathers them."""
