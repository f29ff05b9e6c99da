"""Other systems, a file each."""
