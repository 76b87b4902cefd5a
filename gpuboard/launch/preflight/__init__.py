"""What must hold before ranks start: collected from the nodes, checked with cause and remedy."""
