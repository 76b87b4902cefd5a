"""How bytes reach a node and how the agent there is spoken to."""
