"""The typed shape of each section and group, a file a group. `aorta.config.schema` gathers them."""
