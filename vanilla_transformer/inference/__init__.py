"""Translating texts and scoring translations."""
