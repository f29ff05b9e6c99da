"""Model cards, checks of a folder, and its push to the Hub."""
