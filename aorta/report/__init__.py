"""What people read of a summary: the text of the terminal, pictures, and one HTML page (`page`)."""
