"""Values to wire bytes and back. Import from the modules: this package itself loads no tensor library."""
