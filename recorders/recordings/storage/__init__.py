"""Recordings in folders: saved and loaded, checked and repaired, merged in bounded memory, sent to object stores and fetched."""
