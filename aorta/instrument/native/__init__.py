"""The optional compiled part of the instrumentation, built on request, once for each torch and Python version."""
