"""What tests of several folders share: fakes, fixed inputs, slow references, servers that a test starts."""
