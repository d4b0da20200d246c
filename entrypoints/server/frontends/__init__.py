"""Several front-end processes over one engine: `jackfield serve --api-server-count N`."""
