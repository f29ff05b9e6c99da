"""What `scripts/walkthrough.py` walks through, says and prints."""
