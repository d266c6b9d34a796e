"""A network and its own data: curvature, prior and noise by the evidence, links that match its certainty."""
