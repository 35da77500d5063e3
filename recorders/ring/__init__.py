"""Where observations wait until they are reduced together."""
