"""Groups that span hosts: shared memory inside each host, and another backend between one rank of each."""
