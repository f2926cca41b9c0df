"""Scripts as users have them, for certificates."""
