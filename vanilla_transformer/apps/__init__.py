"""The web page, and Spaces that hold it."""
