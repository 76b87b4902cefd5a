"""The board: the live terminal UI. The only importer of textual; core, scene and the pure parts import none of it."""
