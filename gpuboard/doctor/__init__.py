"""Named checks of this machine, the nodes and all that a launch needs, each with cause and remedy."""
