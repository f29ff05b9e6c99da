"""Brings models of other systems into this package's form, and takes them back where the other system allows it."""
