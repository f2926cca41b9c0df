"""In progress (helper F): see the brief of the engine tests, points 6 to 8."""
