"""The page of the uncertainty report: values go in, HTML comes out."""
