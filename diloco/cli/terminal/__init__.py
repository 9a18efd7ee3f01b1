"""What commands share on a terminal: options, tables, progress."""
