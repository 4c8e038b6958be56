"""Run records: written atomically, read with suspicion, compared in pairs. Import from the modules."""
