"""From files to values: tables, arrays and pictures, networks and weights."""
