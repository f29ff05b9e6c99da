"""The web page, Spaces that hold it, and the server."""
