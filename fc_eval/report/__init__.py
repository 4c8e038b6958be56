"""Records in, tables and plots out. Import from the modules: `terminal` needs no plotting library."""
