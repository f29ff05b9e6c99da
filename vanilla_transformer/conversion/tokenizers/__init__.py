"""Other systems' vocabularies."""
