"""One HTML file that holds a whole report and works from disk, without a network."""
