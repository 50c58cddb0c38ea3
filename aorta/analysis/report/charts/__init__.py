"""The pictures of a report as PNG files, drawn without a display: of each run (`run_pictures`), and of two
(`side_by_side`). Must not touch pyplot or its global backend.
"""
