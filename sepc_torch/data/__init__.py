"""Input validation, files on disk, text tables and progress bars."""
