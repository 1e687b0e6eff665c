"""What an op, a candidate, a key, a policy and a tolerance are; knows no device, file or timer."""
