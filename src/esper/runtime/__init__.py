"""Tasks and data: the worlds that networks grow in."""
