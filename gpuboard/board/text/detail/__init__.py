"""One thing in detail as lines of text: a GPU, a run, a lease (pure)."""
