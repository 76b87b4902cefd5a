"""The parts of an attempt that its head puts together: requests of the user, gate, end, outcome, record."""
