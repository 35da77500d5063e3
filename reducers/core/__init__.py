"""What every reducer is."""
