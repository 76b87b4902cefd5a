"""An allocation as text for shells, launchers and programs."""
