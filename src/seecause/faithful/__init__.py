"""A classifier that decides where to look and cannot look elsewhere (iFAM)."""
