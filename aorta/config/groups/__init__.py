"""The typed schema of each section and group, one file per group. `aorta.config.schema` gathers them."""
