# Zeroth on Debian 12, built as the README says.
#   docker build -t zeroth .
#   docker run --rm zeroth                # make train
#   docker run --rm zeroth make test
FROM debian:12
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates git make g++ python3-pip \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /zeroth
COPY . .
RUN make build
CMD ["make", "train"]
