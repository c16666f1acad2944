
node-1-start-23
node-1node-1:7000"€€€€"€€€€"news(2
user 2item 