"""The compiled part of the instrument: optional, built on request, once for each torch and Python."""
