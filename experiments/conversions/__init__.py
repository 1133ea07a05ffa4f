"""Training programs of others, beside the same programs converted to pipejax."""
