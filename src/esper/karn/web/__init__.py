"""The web page over run directories: what it shows, read as runs grow, and the server. `esper report` freezes
the same page into one file."""
