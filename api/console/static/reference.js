// The API reference: Swagger UI shows the document of this service, and sends requests with a token that you enter.
SwaggerUIBundle({
  url: "/openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  docExpansion: "list",
  displayOperationId: true,
  validatorUrl: null, // it would send the document to another host
});
